// The switch leads to the page that it stands on (a relative link would lead to the start page).
const link = element.querySelector('[data-cr="switch"]');
link.href = location.pathname + link.getAttribute("href");
