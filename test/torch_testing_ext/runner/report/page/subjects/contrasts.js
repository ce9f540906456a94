(() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const paint = (colours) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = (rgb) => {
        const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
        const colours = [];
        for (let e = element; e; e = e.parentElement) colours.unshift(getComputedStyle(e).backgroundColor);
        return colours;
    };
    const found = [];
    for (const element of document.querySelectorAll('main *')) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !element.checkVisibility() || element.closest('title')) continue;
        const style = getComputedStyle(element);
        const colour = element.closest('svg') ? style.fill : style.color;
        const [a, b] = [luminance(paint(behind(element))), luminance(paint([...behind(element), colour]))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.tagName + '.' + element.className]);
    }
    return found.sort((a, b) => a[0] - b[0]);
})()
